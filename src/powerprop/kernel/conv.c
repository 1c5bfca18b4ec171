/* Sparse products and convolutions over rows of lanes, activations as [channels, height, width, batch].

   One weight times a run of lanes is the unit of work: the batch of a linear layer, the pixels and images of a convolution
   of stride 1, whose row of outputs is one run, and all of whose taps are shifts of it. The inputs have zeros around them,
   so that no edge is a case. A tile of up to eight vectors stays in registers for all weights of an output and a block of
   inputs; blocks are as large as what a tile reads of them stays in the first cache. Every number is summed in one order,
   whatever the threads. `infer.c` and its callers check whatever arrives here. */

#include "lanes.h"

/* y = b + Σ v·x for A rows of B vectors: block after block, the sums in y between blocks */
INLINE void tile(const Weights *w, const float *x, int64_t x_row, Plane y, Plane add, int64_t from, int64_t to, int relu,
                 const int A, const int B) {
    for (int64_t b = 0; b < w->blocks; b++) {
        const int32_t *ptr = w->ptr + b * w->rows;
        const int last = b == w->blocks - 1;
        for (int64_t o = from; o < to; o++) {
            float *out = y.data + o * y.channel;
            Lanes s[8];
            if (b == 0) for (int r = 0; r < A * B; r++) s[r] = (Lanes){0} + (w->bias ? w->bias[o] : 0.0f);
            else for (int r = 0; r < A * B; r++) s[r] = load(out + r / B * y.row + LANES * (r % B));
            for (int32_t k = ptr[o]; k < ptr[o + 1]; k++) {
                const float *in = x + w->at[k], v = w->v[k];
                for (int r = 0; r < A * B; r++) s[r] += v * load(in + r / B * x_row + LANES * (r % B));
            }
            if (last && add.data)
                for (int r = 0; r < A * B; r++)
                    s[r] += load(add.data + o * add.channel + r / B * add.row + LANES * (r % B));
            if (last && relu) for (int r = 0; r < A * B; r++) s[r] = positive(s[r]);
            for (int r = 0; r < A * B; r++) store(out + r / B * y.row + LANES * (r % B), s[r]);
        }
    }
}

#define TILE(A, B) \
    CLONES static void tile_##A##_##B(const Weights *w, const float *x, int64_t x_row, Plane y, Plane add, int64_t from, \
                                      int64_t to, int relu) { tile(w, x, x_row, y, add, from, to, relu, A, B); }
TILE(1, 1) TILE(1, 2) TILE(1, 3) TILE(1, 4) TILE(1, 5) TILE(1, 6) TILE(1, 7) TILE(1, 8)
TILE(2, 2) TILE(2, 3) TILE(2, 4) TILE(4, 1) TILE(4, 2) TILE(8, 1)

static void any_tile(int A, int64_t B, const Weights *w, const float *x, int64_t x_row, Plane y, Plane add, int64_t from,
                     int64_t to, int relu) {
    switch (10 * A + (int)B) {
#define CASE(A, B) case 10 * A + B: tile_##A##_##B(w, x, x_row, y, add, from, to, relu); break;
    CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) CASE(1, 5) CASE(1, 6) CASE(1, 7) CASE(1, 8)
    CASE(2, 2) CASE(2, 3) CASE(2, 4) CASE(4, 1) CASE(4, 2) CASE(8, 1)
    }
}

INLINE Plane moved(Plane p, int64_t row, int64_t lane) {
    if (p.data) p.data += row * p.row + lane;
    return p;
}

/* Rows from .. to of the output, `lanes` numbers each (at least 16; the last vector may overlap the one before), share t
   of T: of the tiles, or of the outputs where there are few tiles. `add` may have no data; it is not y. */
void product(Weights w, Plane x, Plane y, Plane add, int64_t from, int64_t to, int64_t lanes, int relu, int64_t t,
             int64_t T) {
    int64_t vectors = lanes / LANES, runs = (vectors + 7) / 8, all = runs + (lanes % LANES != 0), high = to - from;
    int A = vectors == 1 && high >= 8 ? 8 : vectors == 1 && high >= 4 ? 4 : vectors == 2 && high >= 4 ? 4 : 1;
    if (A == 1 && (vectors == 2 || vectors == 3 || vectors == 4) && high >= 2) A = 2;
    int64_t tall = high / A, tiles = (tall + high % A) * all, o0 = 0, o1 = w.rows, first = 0, end = tiles;
    if (tiles >= 2 * T) first = part(tiles, t, T), end = part(tiles, t + 1, T);
    else o0 = part(w.rows, t, T), o1 = part(w.rows, t + 1, T);
    for (int64_t i = first; i < end; i++) {
        int64_t up = i / all, run = i % all, row = from + (up < tall ? up * A : tall * A + up - tall);
        int64_t lane = run < runs ? LANES * part(vectors, run, runs) : lanes - LANES;
        int64_t B = run < runs ? part(vectors, run + 1, runs) - part(vectors, run, runs) : 1;
        any_tile(up >= tall || run >= runs ? 1 : A, B, &w, x.data + row * x.row + lane, x.row, moved(y, row, lane),
                 moved(add, row, lane), o0, o1, relu);
        if (up < tall && run >= runs) /* the lanes left over, of the tile's other rows */
            for (int64_t h = row + 1; h < row + A; h++)
                any_tile(1, 1, &w, x.data + h * x.row + lane, x.row, moved(y, h, lane), moved(add, h, lane), o0, o1, relu);
    }
}

/* The forward pass of a layer: rows of `lanes` numbers, one for a linear layer. */
void powerprop_conv_forward(const int32_t *ptr, const int32_t *at, const float *v, const float *bias, int64_t rows,
                            int64_t blocks, const float *x, int64_t x_row, float *y, int64_t y_channel, int64_t y_row,
                            int64_t height, int64_t lanes, int relu, int threads) {
    Weights w = {ptr, at, v, bias, rows, blocks};
    Plane in = {(float *)x, 0, x_row}, out = {y, y_channel, y_row}, none = {0, 0, 0};
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int t = 0; t < threads; t++) product(w, in, out, none, 0, height, lanes, relu, t, threads);
}
