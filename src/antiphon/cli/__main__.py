"""`python -m antiphon.cli` is the `antiphon` command."""

import sys

from antiphon.cli.main import main

sys.exit(main())
