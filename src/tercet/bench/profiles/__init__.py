"""Where step-time profiles come from: published silicon tables, and measurements of a running engine."""
