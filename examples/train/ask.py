"""Ask a trained model in transformers: python ask.py DIRECTORY QUESTION."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

if len(sys.argv) != 3:
    sys.exit("usage: python ask.py DIRECTORY QUESTION")
_, directory, question = sys.argv
tokenizer = AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory)
chat = [{"role": "user", "content": question}]
prompt = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
answer = model.generate(**prompt, max_new_tokens=48, do_sample=False)
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
