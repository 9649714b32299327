"""OpenAI's batches: files of requests that run in the gaps of interactive traffic."""
