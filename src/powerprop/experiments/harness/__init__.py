"""What every experiment shares: what it is, running its jobs, its folder, its pages."""
