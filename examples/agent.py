"""A program that plays one episode and knows nothing of training: `environment: {type: agent, run: "python examples/agent.py"}`.

It asks the model, asks it to check its answer, and prints what the episode was worth. `pip install openai` where it runs.
"""

import json
import os

import openai

row = json.loads(os.environ["ROLLCALL_ROW"])
client = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are those of this episode


def ask(messages: list) -> str:
    answer = client.chat.completions.create(model="policy", messages=messages)
    messages.append(answer.choices[0].message)
    return answer.choices[0].message.content or ""


question = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
messages = list(question)
ask(messages)
messages.append({"role": "user", "content": "Check this, and write the final answer alone on the last line."})
last_line = (ask(messages).strip().splitlines() or [""])[-1]
print(json.dumps({"reward": float(last_line.strip() == row["answer"].strip())}))
