// A streamed text and a turn with a tool, through the AI SDK's default provider. Prints what came back as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const sent = [];
const openai = createOpenAI({
  baseURL: process.argv[2],
  apiKey: "any",
  fetch: (url, options) => {
    sent.push({ url: String(url), body: JSON.parse(options.body) });
    return fetch(url, options);
  },
});
const model = openai("demo");
const onError = ({ error }) => {
  throw error;
};

const written = streamText({ model, prompt: "hello", maxOutputTokens: 40, temperature: 0, onError });
let text = "";
for await (const piece of written.textStream) text += piece;

const get_train = tool({
  description: "Find a train",
  inputSchema: z.object({ city: z.enum(["Oslo", "Rome"]), seats: z.number().int().min(1).max(9) }),
  execute: async ({ city, seats }) => `${seats} seats to ${city} at 08:10`,
});
const turn = streamText({
  model,
  prompt: "A train to Rome, please.",
  tools: { get_train },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  stopWhen: stepCountIs(2),
  maxOutputTokens: 200,
  temperature: 0,
  providerOptions: { openai: { parallelToolCalls: false } },
  onError,
});
await turn.consumeStream({ onError });
const steps = (await turn.steps).map((step) => ({
  text: step.text,
  calls: step.toolCalls.map((call) => call.input),
  results: step.toolResults.map((result) => result.output),
  finish: step.finishReason,
}));
console.log(JSON.stringify({ text, whole: await written.text, usage: await written.usage, steps, sent }));
