"""What an answer must look like, as a grammar: from GBNF text, JSON Schema or tools. All pure."""
