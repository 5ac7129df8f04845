"""Write numbers.jsonl: 2,000 questions for the smallest of three numbers, one a line."""

import json
import random

random.seed(0)
with open("numbers.jsonl", "w") as file:
    for _ in range(2000):
        numbers = random.sample(range(10, 1000), 3)
        question = f"Which of these numbers is the smallest: {', '.join(map(str, numbers))}?"
        row = {"prompt": question, "answer": min(numbers), "numbers": numbers}
        file.write(json.dumps(row) + "\n")
