"""What a maintainer runs: the command line, and what keeps pages in step."""
