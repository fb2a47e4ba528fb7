"""From data to a trained, evaluated and compared model. Of the rest of the package, only the command imports it."""
