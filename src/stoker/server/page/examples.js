// What an empty conversation offers: of the demonstration model, what it does well.

const text = (description) => ({ type: "string", description });
const tool = (name, description, properties, required) =>
  ({ type: "function", function: { name, description, parameters: { type: "object", properties, required } } });

export const DEMO = [
  {
    title: "Read an invoice",
    about: "JSON by given keys; most drafts are right",
    prompt: `Extract the invoice as JSON with these keys: vendor, invoice_number, date, customer, currency, total, line_items (product, qty, unit_price).

INVOICE

Seller: Harbor Tools Ltd
Invoice no: HT-20418
Date: 2026-03-14
Customer: Anna Kovács

1. desk lamp, 4 pcs, 39.90 each, 159.60
2. office chair, 2 pcs, 189.00 each, 378.00

Net amount: 537.60 EUR
VAT: 145.15 EUR
Total due: 682.75 EUR`,
  },
  {
    title: "Call a tool",
    about: "three are offered; you play the tool",
    prompt: "Get the weather in celsius, for Prague, on 2026-08-21, please.",
    tools: [
      tool("createEvent", "Create event", {
        city: text("Name of the city"), members: { type: "array", description: "Full names", items: { type: "string" } },
        when: text("Date, YYYY-MM-DD"), text: text("Title"),
      }, ["city", "members", "when"]),
      tool("weather_get", "Get weather", {
        unit: { type: "string", description: "Unit", enum: ["celsius", "fahrenheit", "kelvin"] }, city: text("Name of the city"), when: text("Date, YYYY-MM-DD"),
      }, ["unit", "city"]),
      tool("book_flight", "Book flight", { town: text("Name of the city") }, ["town"]),
    ],
    results: { weather_get: '{"temperature": 21, "humidity": 60}' },
  },
  {
    title: "Write a little story",
    about: "prose, where drafts are seldom right",
    prompt: "Tell me a short story about a fox.",
  },
  {
    title: "Answer about a text",
    about: "short reading, short answer",
    prompt: "Anna lives in Győr and works with Paul. At 14:30 Anna bought a green kettle. What did Anna buy?",
  },
];

export const GENERAL = [
  { title: "Explain something", about: "in a few paragraphs", prompt: "Explain how a heat pump works to somebody who knows school physics, in three short paragraphs." },
  { title: "Write code", about: "a function with its tests", prompt: "Write a Python function that parses durations such as 1h30m or 45s into seconds, with pytest tests." },
  { title: "Compare", about: "as a table", prompt: "Compare PostgreSQL, SQLite and DuckDB for a small analytics project. Answer with a table and one recommendation." },
  { title: "Extract", about: "JSON from a note", prompt: "Answer with JSON only. Keys: name, city, phone, wishes (list).\n\nAnna Kovács called from Győr, 06 30 555 0199. She wants the blue chair, and delivery before Friday." },
];
