// Server-sent events of a fetch: the JSON of each, until [DONE] or the end.
export async function* readEvents(response) {
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `The server answered ${response.status}.`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const line = event.split("\n").find((text) => text.startsWith("data: "));
      if (line === "data: [DONE]") return;
      if (line) yield JSON.parse(line.slice(6));
    }
  }
}
