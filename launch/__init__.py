"""Top floor: configuration, command line, driver and jobs."""
