"""LangChain: pip install langchain-openai; python langchain_chat.py [URL]."""

import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
model = ChatOpenAI(model="embedded", base_url=f"{url}/v1", api_key="none", max_tokens=48)
prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{question}")])

for piece in (prompt | model).stream({"question": "What does str.join do?"}):
    print(piece.content, end="", flush=True)
print()
