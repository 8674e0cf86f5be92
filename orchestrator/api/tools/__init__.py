"""Tools: how a model writes its calls, the grammar of such answers, and reading them as they come. All pure."""
