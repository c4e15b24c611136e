"""Pages for the browser, served on this machine alone."""
