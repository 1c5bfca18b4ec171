"""The paper's figures and tables: data, networks, training, experiments and their reports, on top of `powerprop`."""
