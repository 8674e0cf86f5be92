"""Fifty prompts on which speculation must change nothing: chat, code, edits that copy, other languages."""

from __future__ import annotations

CHAT = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Why is the sky blue? Answer in two sentences.",
    "List the planets of the solar system.",
    "Give me a recipe for pancakes.",
    "Tell me a short story about a lighthouse keeper.",
    "What should I pack for a week in the mountains?",
    "Explain recursion to a child.",
    "How does a steam engine work?",
    "Name five fruits, one per line.",
    "Suggest three names for a cat and say why.",
    "What is the difference between a crow and a raven?",
)

CODE = (
    "Write a Python function that adds two numbers.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Write a C function that reverses a string in place.",
    "Write a SQL query that counts the orders of each customer.",
    "Write a shell script that prints the size of every file in a folder.",
    "Write a JavaScript function that removes duplicates from an array.",
    "Write an HTML table with three rows and two columns.",
    "Write a Python class for a stack with push, pop and peek.",
    "Write a Makefile with the targets build, test and clean.",
    "Write a regular expression that matches a date like 2024-01-31, and explain it.",
    "Write a Rust function that computes the greatest common divisor.",
    "Write a JSON object that describes a book with title, author and year.",
)

_SHAPES = '''def area(width, height):
    """Return the area of a rectangle."""
    return width * height


def perimeter(width, height):
    """Return the perimeter of a rectangle."""
    return 2 * (width + height)
'''

_STORE = """class Store:
    def __init__(self, name):
        self.name = name
        self.items = {}

    def add(self, item, count):
        self.items[item] = self.items.get(item, 0) + count

    def remove(self, item, count):
        self.items[item] = self.items.get(item, 0) - count
"""

_SETTINGS = """{
  "host": "localhost",
  "port": 8080,
  "timeout": 30,
  "retries": 3,
  "paths": ["/health", "/status", "/metrics"]
}
"""

_TABLE = """| name  | city   | age |
|-------|--------|-----|
| Anna  | Berlin | 31  |
| Bruno | Madrid | 45  |
| Clara | Lisbon | 27  |
"""

_LETTER = (
    "Dear Sir or Madam, I am writing to you about the order that I placed on the third of May. The parcel has "
    "not arrived yet. Please let me know where the parcel is and when I can expect it. Yours sincerely, John Smith."
)

_NOTES = "The meeting begins at nine. The meeting is in room four. Bring the report. The report is about the meeting."

COPY = (
    f"Repeat this code exactly and change nothing:\n```python\n{_SHAPES}```",
    f"Rename `width` to `w` in this code and return all of it:\n```python\n{_SHAPES}```",
    f"Add a function `diagonal` to this code and return all of it:\n```python\n{_SHAPES}```",
    f"Repeat this class and change nothing:\n```python\n{_STORE}```",
    f"Add a method `clear` to this class and return all of it:\n```python\n{_STORE}```",
    f"Rename the class to `Shop` and return all of the code:\n```python\n{_STORE}```",
    f"Change the port to 9090 and return the whole file:\n```json\n{_SETTINGS}```",
    f"Copy this file, without any change:\n```json\n{_SETTINGS}```",
    f"Copy this table and change nothing:\n{_TABLE}",
    f"Add a row for Daniel from Vienna, 38, and return the whole table:\n{_TABLE}",
    f"Correct the spelling of this letter and return all of it: {_LETTER}",
    f"Copy this letter word for word: {_LETTER}",
    f"Repeat these notes twice: {_NOTES}",
    f"Repeat the following list three times: {', '.join(str(number) for number in range(1, 31))}",
)

OTHER = (
    "Quelle est la capitale de l'Italie ?",
    "Écris un court poème sur la mer.",
    "Was ist der Unterschied zwischen Wetter und Klima?",
    "Schreibe einen kurzen Brief an deine Großmutter.",
    "¿Cuáles son los colores del arco iris?",
    "Escribe una receta de tortilla de patatas.",
    "Qual é a maior cidade do Brasil?",
    "Переведи на английский: доброе утро, как дела?",
    "日本の首都はどこですか。",
    "请用一句话介绍长城。",
    "ما هي عاصمة مصر؟",
    "भारत की राजधानी क्या है?",
)

PROMPTS = tuple(
    (kind, text)
    for kind, texts in (("chat", CHAT), ("code", CODE), ("copy", COPY), ("other", OTHER))
    for text in texts
)
"""(kind, text)."""

QUICK = tuple(
    entry for kind in ("chat", "code", "copy", "other") for entry in [one for one in PROMPTS if one[0] == kind][:2]
)
"""Two of each kind, for a quick look."""
