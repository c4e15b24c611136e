"""The command line: parses, calls the libraries, prints. Nothing imports it."""
