"""The OpenAI-compatible HTTP endpoint in front of a gateway."""
