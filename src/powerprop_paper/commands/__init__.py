"""The commands of the paper's package besides `run`: each a dataclass of its options that does its work when called."""

from powerprop_paper.commands.compare import Compare
from powerprop_paper.commands.results import Results
from powerprop_paper.commands.show import List, Show

COMMANDS = {"list": List, "results": Results, "compare": Compare, "show": Show}
