"""Top floor: configuration, command line, driver and jobs."""

import mesh  # noqa: F401  before anything imports Monarch: it sets how fast dead processes are noticed
