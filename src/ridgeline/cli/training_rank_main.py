"""A rank of a training: ``python -m ridgeline.cli.training_rank_main PARENT RENDEZVOUS WORDS…``."""

import sys
from pathlib import Path

from ridgeline.cli.main import main
from ridgeline.compress.ranks import join_launched
from ridgeline.core.host import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    join_launched(Path(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
