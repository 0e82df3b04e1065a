"""Tool dispatch: from a model's tool call to its one result."""
