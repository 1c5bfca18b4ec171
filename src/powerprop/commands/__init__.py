"""What the commands of the command line do, one file per group; `powerprop.cli` has their table."""
