"""What runs in an engine's workers: the KV cache's memory and layout, and which layers are finished."""
