"""What does a maintainer run? The `cookbook` command and its subcommands."""
