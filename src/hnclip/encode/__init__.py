"""The one encoder loop, and directories of embeddings."""
