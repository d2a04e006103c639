"""All that touches llama.cpp."""
