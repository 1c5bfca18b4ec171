"""Task after task in one network: figure 4 and the table of class-incremental learning."""
