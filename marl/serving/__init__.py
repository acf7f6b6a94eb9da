"""A trained team behind one OpenAI-compatible endpoint."""
