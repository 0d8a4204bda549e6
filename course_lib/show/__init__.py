"""Tables, source listings and figures for notebooks."""
