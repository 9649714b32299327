"""What kinds of models go through Tercet: tiny random ones of each family, on two real engines (`make test-models`)."""
