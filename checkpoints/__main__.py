"""`python -m checkpoints ls|show|verify URL`: what is at a URL, and whether it is whole."""

import sys

from checkpoints.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
