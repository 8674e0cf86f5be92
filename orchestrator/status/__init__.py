"""The fleet's truth as one frozen value: what the gateway serves at ``GET /status`` and the monitor draws."""
