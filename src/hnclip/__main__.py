"""`python -m hnclip` is the `hnclip` command."""

import sys

from hnclip.cli import main

sys.exit(main())
