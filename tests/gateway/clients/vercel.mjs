// The Vercel AI SDK: `node vercel.mjs JOBS chat|responses|messages`. Node looks for packages beside the program: see test_clients.py.

import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const SYSTEM = 'You are a helpful assistant.';
const IDLE_MS = 2000;
const [list, api] = process.argv.slice(2);

const tools = {
  weather: tool({ description: 'The weather of a city.', inputSchema: z.object({ city: z.string() }), execute: async () => '22 degrees' }),
  save: tool({ description: 'Save a file.', inputSchema: z.object({ text: z.string() }), execute: async () => 'saved' }),
};

// Fetch that gives up an answer that says nothing for IDLE_MS.
async function impatient(url, options) {
  const over = new AbortController();
  let timer = setTimeout(() => over.abort(), IDLE_MS);
  const answer = await fetch(url, { ...options, signal: over.signal });
  const watched = answer.body.pipeThrough(new TransformStream({
    transform(chunk, out) { clearTimeout(timer); timer = setTimeout(() => over.abort(), IDLE_MS); out.enqueue(chunk); },
    flush() { clearTimeout(timer); },
  }));
  return new Response(watched, { status: answer.status, headers: answer.headers });
}

function model({ base_url: baseURL, key: apiKey }, more) {
  if (api === 'messages') return createAnthropic({ baseURL: `${baseURL}/v1`, apiKey, ...more })('policy');
  if (api === 'responses') return createOpenAI({ baseURL, apiKey, ...more }).responses('policy');
  return createOpenAICompatible({ name: 'session', baseURL, apiKey, ...more })('policy');
}

async function ask(job, words, names, more = {}) {
  const offered = Object.fromEntries(names.map((name) => [name, tools[name]]));
  let failed;
  const result = streamText({
    model: model(job, more), system: SYSTEM, prompt: words, maxRetries: 0, stopWhen: stepCountIs(5),
    ...(names.length ? { tools: offered } : {}), onError: ({ error }) => { failed = error; },
  });
  await result.consumeStream();
  if (failed) throw failed;
  return await result.text;
}

const kinds = {
  tool: (job) => ask(job, 'the weather in Paris, please', ['weather']),
  long: (job) => ask(job, 'write the long file', ['save'], { fetch: impatient }),
  'at once': async (job) => {
    const answers = await Promise.all(Array.from({ length: 40 }, () => ask(job, 'say hello', [])));
    const counts = {};
    for (const words of answers) counts[words] = (counts[words] ?? 0) + 1;
    return Object.entries(counts).sort().map(([words, count]) => `${count} x ${words}`).join('; ');
  },
};

const said = {};
for (const job of JSON.parse(list)) {
  try { said[job.name] = await kinds[job.kind](job); } catch (error) { console.error(error); said[job.name] = `${error}`; }
}
console.log(`\n${JSON.stringify(said)}`);
