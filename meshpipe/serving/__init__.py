"""Ways to use a pipeline from outside trio: the OpenAI-compatible server."""
