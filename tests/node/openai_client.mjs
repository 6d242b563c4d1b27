// What a program in JavaScript does with the official client: node openai_client.mjs URL MODEL
// prints one JSON object, a member per call.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [
  { role: "system", content: "Be brief." },
  { role: "user", content: "Count to twenty." },
];
const common = { model, messages, max_tokens: 8, temperature: 0 };

const models = [];
for await (const entry of client.models.list()) models.push(entry.id);

const plain = await client.chat.completions.create(common);
const warm = await client.chat.completions.create(common);

let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...common,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const runner = client.chat.completions.stream(common);
const final = await runner.finalChatCompletion();

const schema = {
  type: "object",
  properties: { colour: { enum: ["red", "green"] } },
  required: ["colour"],
  additionalProperties: false,
};
const structured = await client.chat.completions.create({
  ...common,
  max_tokens: 64,
  response_format: { type: "json_schema", json_schema: { name: "c", strict: true, schema } },
});

const called = await client.chat.completions.create({
  ...common,
  max_tokens: 64,
  tools: [{ type: "function", function: { name: "paint", parameters: schema } }],
  tool_choice: { type: "function", function: { name: "paint" } },
});

const first = await client.responses.create({ model, input: "Hello.", max_output_tokens: 8 });
const second = await client.responses.create({
  model,
  input: "And again.",
  max_output_tokens: 8,
  previous_response_id: first.id,
});
const events = [];
const responses = await client.responses.create({
  model,
  input: "Hello.",
  max_output_tokens: 8,
  stream: true,
});
for await (const event of responses) events.push(event.type);

let refused = null;
try {
  await client.chat.completions.create({ ...common, temperature: 9 });
} catch (error) {
  refused = { status: error.status, param: error.param, kind: error.constructor.name };
}

const aborted = await client.chat.completions.create({ ...common, max_tokens: 200, stream: true });
for await (const chunk of aborted) {
  if (chunk.choices[0]?.delta?.content) break; // closes the connection
}

console.log(
  JSON.stringify({
    models,
    plain: plain.choices[0].message.content,
    cached: warm.usage.prompt_tokens_details.cached_tokens,
    prompt_tokens: warm.usage.prompt_tokens,
    streamed,
    usage,
    final: final.choices[0].message.content,
    structured: structured.choices[0].message.content,
    called: called.choices[0].message.tool_calls[0].function,
    first: { text: first.output_text, input: first.usage.input_tokens },
    second: { input: second.usage.input_tokens, previous: second.previous_response_id === first.id },
    events,
    refused,
  }),
);
