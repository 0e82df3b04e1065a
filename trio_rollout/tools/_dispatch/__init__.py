"""Tool dispatch: from a model's request to its one result."""
