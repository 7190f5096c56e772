"""`python -m namm` is the `namm` command."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # `-m` puts the current folder there, whose files are nobody's modules

from namm.cli import main

sys.exit(main())
