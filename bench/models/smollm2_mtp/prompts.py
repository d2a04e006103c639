# ruff: noqa: E501, SIM905 (instructions are data, and read best one a line)
"""What the model is asked so that it writes the text to train on: instructions of many kinds, drawn from a seed.

The kinds are those that the `workloads` benchmark also has, but none of its prompts and few of its subjects occur here:
those prompts are held out to measure acceptance with. Passages come from two places that every machine has: sentences
put together from lists below, and the standard library's sources and help texts.
"""

from __future__ import annotations

import functools
import json
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics as HELP

SUBJECTS = """
the tides|how bread rises|volcanoes|the Roman roads|honey bees|the invention of the telephone|coral reefs|black holes|
the French Revolution|how a violin makes sound|deserts|the human eye|migrating birds|the Silk Road|photosynthesis|
jazz music|chess openings|glaciers|how batteries store energy|the Great Wall of China|dolphins|rainforests|electric cars|
the moon landing|how rainbows form|medieval castles|the stock market|inflation|democracy|the water cycle|earthquakes|
gravity|sleep|memory|time management|public speaking|healthy breakfasts|yoga|long-distance running|gardening on a balcony|
composting|learning a new language|saving money|job interviews|remote work|teamwork|raising a puppy|cats|horses|owls|
spiders|penguins|elephants|wolves|the Amazon river|the Sahara|Iceland|Japan|Brazil|Egypt|India|New Zealand|Norway|Kenya|
coffee|chocolate|cheese|olive oil|spices|rice|apples|potatoes|wine|ice cream|soup|pizza|bicycle repair|trains|sailing ships|
airplanes|bridges|skyscrapers|lighthouses|wind mills|clocks|the compass|paper|glass|steel|plastic|cotton|silk|gold|salt|
diamonds|the atom|DNA|bacteria|viruses|antibiotics|the immune system|the brain|blood|bones|muscles|teeth|skin|the lungs|
diabetes|allergies|exercise|stress|meditation|friendship|honesty|courage|patience|happiness|justice|freedom|education|
libraries|museums|theatre|opera|ballet|painting|sculpture|photography|poetry|novels|fairy tales|myths of Greece|Shakespeare|
Mozart|Leonardo da Vinci|Marie Curie|Isaac Newton|Charles Darwin|Nikola Tesla|Cleopatra|Napoleon|Gandhi|Lincoln|
the Second World War|the Cold War|the Black Death|the Renaissance|the Industrial Revolution|the Vikings|the Aztecs|the Ottoman Empire|
the Olympic Games|football|tennis|swimming|basketball|mountain climbing|camping|fishing|skiing|surfing|dancing|singing|
the piano|the guitar|the drum|the flute|radio|television|the internet|computers|robots|artificial intelligence|databases|
encryption|open source software|video games|social media|smartphones|satellites|telescopes|comets|Mars|Jupiter|the Sun|
stars|galaxies|time travel|climate change|recycling|nuclear energy|hydropower|insulation|public transport|city parks|
farming|fisheries|forests|rivers|lakes|oceans|storms|snow|fog|lightning|the seasons|calendars|maps|money|taxes|insurance|
marriage customs|festivals|cooking for guests|birthday parties|weddings|holidays with children|moving house|buying a used car|
writing a diary|reading habits|small talk|apologies|negotiation|leadership|marketing|customer service|starting a business
""".replace("\n", "").split("|")  # fmt: skip

NAMES = "Ada Bruno Clara Dmitri Elena Farid Grace Hugo Ines Jonas Keiko Lars Mei Nadia Omar Paula Quentin Rosa Samir Tara Uwe Vera Wim Yara Zoe".split()
PLACES = "Oslo Porto Graz Lyon Kyoto Quito Dakar Perth Tampere Bergen Cork Turin Ghent Basel Split Riga Cusco Hue Fes Leeds".split()
THINGS = "lamp chair kettle bicycle camera tent piano ladder carpet mirror drill blanket radio clock basket saddle telescope rope stove anchor".split()
TRADES = "baker sailor teacher nurse carpenter pilot farmer librarian gardener astronaut blacksmith chef painter detective judge fisherman clockmaker postman shepherd dragon wizard pirate knight robot ghost".split()
ADJECTIVES = "old quiet clever lonely brave tired curious stubborn cheerful mysterious tiny forgetful proud gentle".split()
LANGUAGES = "French Spanish German Italian Portuguese Dutch".split()
LISTS = """
reverses a string|checks whether a number is prime|sorts a list of numbers|counts the vowels in a text|merges two sorted lists|
finds the largest number in a list|computes the factorial of n|checks whether a word is a palindrome|removes duplicates from a list|
reads a CSV file and prints its columns|counts how often each word occurs|converts Celsius to Fahrenheit|flattens a nested list|
finds the greatest common divisor|implements binary search|computes the mean and the median|validates an email address|
generates a random password|parses a date|groups a list of words by their first letter|transposes a matrix|rotates a list|
implements a stack|implements a queue|implements a linked list|walks a directory tree|downloads a web page|draws a triangle of stars|
rolls two dice|finds all anagrams|computes compound interest|converts a number to binary|multiplies two matrices|zips two lists into a dictionary
""".replace("\n", "").split("|")  # fmt: skip
CODE = "Python Python Python JavaScript Java C Go bash".split()

Draw = random.Random


def sentence(draw: Draw) -> str:
    """One made-up fact."""
    name, place, thing = draw.choice(NAMES), draw.choice(PLACES), draw.choice(THINGS)
    return draw.choice(
        [
            f"The {thing} factory of {place} was founded in {draw.randint(1820, 1990)} and has {draw.randint(12, 900)} workers.",
            f"{name} moved from {place} to {draw.choice(PLACES)} in {draw.randint(1950, 2020)} and became a {draw.choice(TRADES)}.",
            f"A {thing} costs {draw.randint(5, 400)} euros in {place}, but only {draw.randint(2, 300)} in {draw.choice(PLACES)}.",
            f"The road between {place} and {draw.choice(PLACES)} is {draw.randint(20, 900)} kilometres long and was closed in {draw.choice(['January', 'March', 'June', 'October'])}.",
            f"{name} and {draw.choice(NAMES)} repaired the {draw.choice(ADJECTIVES)} {thing} together and sold it for {draw.randint(20, 900)} euros.",
            f"The museum of {place} shows {draw.randint(3, 90)} paintings of {draw.choice(SUBJECTS)} and opens at {draw.randint(8, 11)} o'clock.",
            f"In {place} the {draw.choice(TRADES)} {name} collects every {thing} that was made before {draw.randint(1850, 1990)}.",
            f"{name} says that {draw.choice(SUBJECTS)} should be taught in every school of {place}, while {draw.choice(NAMES)} disagrees.",
            f"Last year {draw.randint(100, 9999)} visitors came to {place} because of the festival of {draw.choice(SUBJECTS)}.",
        ]
    )


def passage(draw: Draw) -> str:
    """A paragraph: made up, or from Python's help."""
    if draw.random() < 0.7:
        return " ".join(sentence(draw) for _ in range(draw.randint(3, 8)))
    return _excerpt(draw, HELP[draw.choice(sorted(HELP))], draw.randint(300, 900))


def source(draw: Draw, size: int) -> str:
    """Consecutive lines of a module of the standard library, about `size` characters."""
    return _excerpt(draw, draw.choice(_modules()).read_text("utf-8", "replace"), size)


def _excerpt(draw: Draw, text: str, size: int) -> str:
    start = draw.randrange(max(len(text) - size, 1))
    start = text.find("\n", start) + 1
    return text[start : start + size].strip("\n")


@functools.cache
def _modules() -> list[Path]:
    return sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))


def orders(draw: Draw) -> str:
    """Lines of an order book."""
    return "\n".join(
        f"Order {draw.randint(1000, 9999)}: {draw.choice(NAMES)}, {draw.randint(1, 9)} {draw.choice(THINGS)}s, "
        f"{draw.randint(5, 500)}.{draw.randint(10, 99)} EUR, {draw.choice(PLACES)}"
        for _ in range(draw.randint(3, 7))
    )


def coding(draw: Draw) -> str:
    """Programs to write, to explain or to edit."""
    task, language = draw.choice(LISTS), draw.choice(CODE)
    name = draw.choice("store cache queue parser account matrix player invoice".split())
    return draw.choice(
        [
            f"Write a {language} function that {task}.",
            f"Write a {language} program that {task}, with comments.",
            f"Write a {language} class for a {name} and show how it is used.",
            f"Write unit tests for a function that {task}.",
            f"Show me how to write code that {task}. Explain every line.",
            f"Explain this code:\n\n{source(draw, draw.randint(200, 700))}",
            f"Add comments to this code and repeat it:\n\n```python\n{source(draw, draw.randint(200, 600))}\n```",
            f"Rename the variable {draw.choice(['name', 'value', 'self', 'line', 'result'])} to {name}. Answer with the whole code and nothing else.\n\n```python\n{source(draw, draw.randint(200, 600))}\n```",
            f"Find the bugs in this code and answer with the corrected code:\n\n```python\n{source(draw, draw.randint(200, 500))}\n```",
            f"Write a SQL query that lists the {name}s of {draw.choice(PLACES)} with the highest total.",
            f"Write a JSON document that describes a {name} with five fields.",
            f"Write an HTML page about {draw.choice(SUBJECTS)}.",
        ]
    )


def knowledge(draw: Draw) -> str:
    """Humanities, sciences, questions and answers."""
    one, two = draw.choice(SUBJECTS), draw.choice(SUBJECTS)
    return draw.choice(
        [
            f"What should everyone know about {one}?",
            f"Explain {one} to a child.",
            f"Explain {one} in detail.",
            f"Give me a short history of {one}.",
            f"What are the advantages and disadvantages of {one}?",
            f"List ten facts about {one}.",
            f"Why are people interested in {one}?",
            f"How did {one} change the world?",
            f"Compare {one} and {two}.",
            f"What do {one} and {two} have in common?",
            f"What is the best way to learn about {one}?",
            f"Who knows most about {one}, and why?",
            f"Write three questions about {one} and answer them.",
            f"Describe {one} in three paragraphs.",
            f"Tell me something surprising about {one}.",
            f"What are common mistakes in thinking about {one}?",
            f"Write a lesson plan about {one}.",
            f"Define {one} in one sentence, then give two examples.",
            f"Write an encyclopedia article about {one}.",
            f"{one[0].upper()}{one[1:]}?",
        ]
    )


def mathematics(draw: Draw) -> str:
    """Arithmetic and puzzles."""
    a, b, c = draw.randint(2, 30), draw.randint(2, 99), draw.randint(100, 999)
    one, two, three = draw.sample(NAMES, 3)
    thing = draw.choice(THINGS)
    return draw.choice(
        [
            f"Solve {a}x + {b} = {c} step by step.",
            f"What is {a} times {b}? Show your work.",
            f"{one} has {b} {thing}s and gives {a} of them to {two}. How many are left? Explain.",
            f"A {thing} costs {b} euros. What do {a} {thing}s cost with a discount of {draw.choice([5, 10, 20, 25])} percent?",
            f"Write the first twenty multiples of {a}.",
            f"Find the derivative of {a}x^2 + {b}x - {c}.",
            f"What is the area of a rectangle of {a} by {b} metres? And its perimeter?",
            f"{one} is older than {two}, and {two} is older than {three}. Who is the youngest? Explain step by step.",
            f"Convert {c} minutes to hours and minutes.",
            f"Write {c} as a product of primes, step by step.",
            f"A car drives {c} kilometres in {a} hours. How fast is it on average?",
            f"If today is Monday, which day is it in {b} days?",
            f"Continue the sequence {a}, {2 * a}, {3 * a}, {4 * a} and explain the rule.",
            f"Write the multiplication table of {a} up to {a} × 12, one line for each.",
            f"What is {b}% of {c}? Show every step.",
            f"Is {c} a prime number? Explain.",
            f"Write the sum of {a}, {b} and {c} and explain how to add them.",
            f"{one} walks {a} kilometres, {two} walks twice as far and {three} {b} kilometres less than both. How far did each walk?",
            f"All {thing}s in {draw.choice(PLACES)} are {draw.choice(ADJECTIVES)}. {one} has one of them. What do we know? Explain.",
            f"Simplify {a}(x + {b}) - {c}x.",
            f"There are {a} red and {b} blue balls in a bag. How likely is a red one? Explain.",
        ]
    )


def languages(draw: Draw) -> str:
    """Translations, and instructions in other languages."""
    language, name, place, thing = (
        draw.choice(LANGUAGES),
        draw.choice(NAMES),
        draw.choice(PLACES),
        draw.choice(THINGS),
    )
    return draw.choice(
        [
            f"Translate into {language}: {sentence(draw)}",
            f"Translate into {language}: {name} would like to buy a {thing} in {place}.",
            f"Write ten useful phrases in {language} with their English translation.",
            f"Count from {draw.randint(1, 20)} to {draw.randint(25, 50)} in {language}.",
            f"Teach me how to introduce myself in {language}.",
            f"Raconte une histoire courte sur {name} à {place}.",
            f"Escribe una carta breve de {name} a un amigo en {place}.",
            f"Schreibe einen kurzen Text über die Stadt {place}.",
            f"Scrivi una breve descrizione di {place}.",
            f"Qu'est-ce qu'il faut visiter à {place} ?",
            f"Was macht ein guter Lehrer in {place}?",
            f"Zähle von {draw.randint(1, 20)} bis {draw.randint(25, 50)}.",
            f"Explique en français pourquoi {draw.choice(['le ciel est bleu', 'les oiseaux chantent', 'il faut dormir', 'la mer est salée'])}.",
            f"Schreibe eine E-Mail an {name} über {draw.choice(['das Essen', 'die Arbeit', 'den Urlaub', 'ein Buch', 'einen Hund'])}.",
            f"Escribe un poema sobre {draw.choice(['la noche', 'el mar', 'los amigos', 'la lluvia', 'el pan'])}.",
            f"Translate into English: {draw.choice(['Der Zug nach', 'Le train pour', 'El tren para', 'Il treno per'])} {place}.",
            f'How do you say in {language}: "Where is the {thing}?" Give three examples more.',
            "Explica cómo se hace " + draw.choice(["el pan", "una sopa", "una ensalada", "el café"]) + ".",
        ]
    )


def passages(draw: Draw) -> str:
    """Answers from a text, summaries, extraction, copies."""
    if draw.random() < 0.3:
        task = draw.choice(
            [
                "Extract the orders as a JSON list with one object for each order.",
                "Write these orders as a table with one column for each value.",
                "Which order is the largest? Answer with the whole line.",
                "Repeat these lines, sorted by name.",
                "Write the names and cities as a JSON list of objects.",
            ]
        )
        return f"{task}\n\n{orders(draw)}"
    task = draw.choice(
        [
            "Summarize this text.",
            "Summarize in one sentence.",
            "List the main points of this text as bullet points.",
            "Repeat the following text exactly.",
            "Rewrite this text in simpler words.",
            "Rewrite this text in a formal style.",
            "Correct the spelling of this text.",
            "Write three questions that this text answers, with the answers.",
            f"Answer from this text only: what is said about {draw.choice(PLACES)}?",
            "What numbers are in this text, and what do they count?",
            "Give this text a title and explain your choice.",
            "Continue this text.",
        ]
    )
    return f"{task}\n\n{passage(draw)}"


def writing(draw: Draw) -> str:
    """Stories, letters, poems, and parts to play."""
    who, name, place, one = (
        draw.choice(TRADES),
        draw.choice(NAMES),
        draw.choice(PLACES),
        draw.choice(SUBJECTS),
    )
    how, thing = draw.choice(ADJECTIVES), draw.choice(THINGS)
    return draw.choice(
        [
            f"Write a short story about a {how} {who} who finds a {thing}.",
            f"Write a story that begins in {place} and ends with a {thing}.",
            f"Write a poem about {one}.",
            f"Write a letter from {name} to the mayor of {place} about {one}.",
            f"Write an email that invites {name} to a talk about {one}.",
            f"Write a dialogue between a {who} and a {draw.choice(TRADES)} about {one}.",
            f"Write a product description for a {how} {thing}.",
            f"Write a speech about {one} for a school in {place}.",
            f"Write a review of a book about {one}.",
            f"Write a recipe that {name} from {place} would like.",
            f"Write a plan for two days in {place}.",
            f"Write a newspaper article about a {thing} that disappeared in {place}.",
            f"You are a {how} {who} in {place}. Tell me about your day.",
            f"You are a {who}. Answer a visitor who asks about {one}.",
            f"Pretend to be a {thing} in the house of {name}. What do you think about?",
            f"Give {name} advice about {one}.",
            f"Describe the {how} {who} {name} in detail.",
            f"Write an advertisement for {place}.",
            f"Write a diary entry of a {who} who is afraid of {one}.",
        ]
    )


def program(draw: Draw) -> tuple[str, str, list[str]]:
    """A made-up module with one class: its text, the class and the methods."""
    name = draw.choice(
        "Account Basket Calendar Diary Engine Garden Inventory Journal Lamp Menu Planner Robot Route Score Timer Wallet".split()
    )
    part = draw.choice(
        "amount color count entry key level name owner price size speed title total weight".split()
    )
    parts = f"{part}s"
    methods = draw.sample(
        [
            ("add", f"    def add(self, {part}):\n        self.{parts}.append({part})\n"),
            ("remove", f"    def remove(self, {part}):\n        self.{parts}.remove({part})\n"),
            ("count", f"    def count(self):\n        return len(self.{parts})\n"),
            ("clear", f"    def clear(self):\n        self.{parts} = []\n"),
            ("first", f"    def first(self):\n        return self.{parts}[0]\n"),
            ("has", f"    def has(self, {part}):\n        return {part} in self.{parts}\n"),
            ("show", f"    def show(self):\n        for {part} in self.{parts}:\n            print({part})\n"),
            ("read", f"    def read(self, file):\n        for line in file:\n            self.{parts}.append(line.strip())\n"),
            ("write", f"    def write(self, file):\n        for {part} in self.{parts}:\n            file.write(str({part}) + \"\\n\")\n"),
            ("largest", f"    def largest(self):\n        return max(self.{parts})\n"),
        ],
        draw.randint(2, 4),
    )  # fmt: skip
    lines = draw.choice(
        ["import sys\n\n\n", "import os\nimport time\n\n\n", "from math import sqrt\n\n\n", ""]
    )
    lines += f"class {name}:\n    def __init__(self, owner):\n        self.owner = owner\n        self.{parts} = []\n\n"
    return lines + "\n".join(text for _, text in methods), name, [method for method, _ in methods]


def editing(draw: Draw) -> str:
    """Files to change and to repeat, and tasks of a coding agent."""
    text, name, methods = program(draw)
    method, other = (
        draw.choice(methods),
        draw.choice("append check fetch insert lookup open print reset".split()),
    )
    change = draw.choice(
        [
            f"Rename the class {name} to {name}{draw.choice(['Book', 'List', 'Box', 'Manager'])}.",
            f"Rename the method {method} to {other}.",
            f"Add a docstring to the method {method}.",
            "Add a type hint to every argument.",
            f"Add a method {other}(self, value).",
            f"Change the method {method} so that it prints a line first.",
            f"Change the method {method} so that it raises an error when there is nothing to do.",
            "Put a comment above every method.",
            f"Remove the method {method}.",
        ]
    )
    return draw.choice(
        [
            f"{change} Answer with the whole file and nothing else.\n\n```python\n{text}```",
            f"{change} Give me the complete code.\n\n{text}",
            f"You are a programming assistant. Your task: {change} This is the file.\n\n```python\n{text}```\n\nFirst say what you will do, then write the new method.",
            f"You are a coding agent. {change}\n\n```python\n{text}```\n\nWrite only the method that changes.",
            f"Explain what each method of this class does.\n\n```python\n{text}```",
            f"Write tests for this class.\n\n```python\n{text}```",
            f"Copy this file exactly.\n\n```python\n{text}```",
        ]
    )


def extraction(draw: Draw) -> str:
    """Values to take out of lines or facts, as JSON, tables or lists."""
    keys = draw.choice(
        [
            "number and name",
            "name, thing and price",
            "name and place",
            "thing and count",
            "number, price and place",
        ]
    )
    task = draw.choice(
        [
            "Write the orders as a JSON list of objects.",
            f"Extract {keys} of every order as JSON.",
            f"Answer with JSON only: {keys} of each line.",
            "Write these orders as a Markdown table.",
            "Write a JSON object from order number to name.",
            f"Write the orders above {draw.randint(50, 400)} EUR as JSON.",
            f"Write {keys} of every line as CSV.",
            "Make a bullet list of the orders, one sentence for each.",
            "Write these orders as YAML.",
            "What was ordered, by whom? Answer with one line for each order.",
        ]
    )  # fmt: skip
    return f"{task}\n\n{orders(draw)}"


def numbered(draw: Draw) -> str:
    """A question that numbered passages answer, or do not."""
    facts = [" ".join(sentence(draw) for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(2, 4))]
    text = "\n".join(f"Passage {number}: {fact}" for number, fact in enumerate(facts, 1))
    question = draw.choice(
        [
            f"What do the passages say about {draw.choice(PLACES)}?",
            f"Who is {draw.choice(NAMES)}?",
            "Which towns are named, and why?",
            "Which numbers are named, and what do they count?",
            f"When did something happen to the {draw.choice(THINGS)}?",
            "Which passage is about money?",
            "What happened first?",
        ]
    )
    return f"Use only these passages to answer.\n\n{text}\n\n{question}"


KINDS: list[tuple[Callable[[Draw], str], float]] = [
    (coding, 0.13), (editing, 0.12), (extraction, 0.08), (knowledge, 0.20), (mathematics, 0.12), (languages, 0.10),
    (numbered, 0.04), (passages, 0.08), (writing, 0.13),
]  # fmt: skip


def instruction(draw: Draw) -> str:
    """An instruction of a kind drawn by weight."""
    kinds, weights = zip(*KINDS, strict=True)
    chosen: Callable[[Draw], str] = draw.choices(kinds, weights)[0]
    return chosen(draw)


def held_out() -> list[tuple[str, str]]:
    """Category and text of instructions never trained on: first turns of the `workloads` benchmark."""
    from bench.workloads import DATA

    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    return [(row["category"], row["turns"][0]) for row in rows]
