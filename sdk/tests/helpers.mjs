// The helpers of the SDK for JavaScript, on the host, with stand-ins for what a component imports.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';

const source = readFileSync(new URL('../js/template/tally_sdk.js', import.meta.url), 'utf8');
const standIns = 'const counter = () => 0, write = () => {}, counterAdd = (_, n) => globalThis.added.push(n);';
const code = source.replace(/^import .*$/gm, '') + standIns;
const sdk = await import(`data:text/javascript,${encodeURIComponent(code)}`);
const { Counter, LruMap, Reader, TokenBucket, Writer } = sdk;
const saved = (data, format = 'f', version = 2) => ({ format, version, data });

const out = new Writer('f', 2);
out.number(3);
out.number(70_000);
out.text('a\u00e9');
assert.deepEqual([...out.finish().data], [0x03, 0xf0, 0xa2, 0x04, 0x03, 0x61, 0xc3, 0xa9]);
out.number(2 ** 53 - 1);
out.text('50% \u2603');
const from = new Reader(out.finish(), 'f', 2);
assert.deepEqual([from.number(), from.number(), from.text()], [3, 70_000, 'a\u00e9']);
assert.deepEqual([from.number(), from.text(), from.isDone()], [2 ** 53 - 1, '50% \u2603', true]);

const is = (kind) => (error) => typeof error === kind;
const above = [...Array(9).fill(0xff), 2];
for (const data of [[], Array(9).fill(0x80), above, Array(10).fill(0xff)]) {
  assert.throws(() => new Reader(saved(data), 'f', 2).number(), is('string'));
}
for (const data of [[9, 0x61], [1, 0xff]]) {
  assert.throws(() => new Reader(saved(data), 'f', 2).text(), is('string'));
}
for (const [format, version] of [['g', 2], ['f', 1], ['f', 3]]) {
  assert.throws(() => new Reader(saved([0], format, version), 'f', 2), is('string'));
}

globalThis.added = [];
const counter = new Counter('n');
for (let n = 0; n < 600; n++) counter.add();
counter.handOver();
assert.deepEqual(globalThis.added, [256, 256, 88]);

const map = new LruMap(2);
map.set(1, 'a');
map.set(2, 'b');
map.get(1);
map.set(3, 'c');
assert.deepEqual([map.get(1), map.get(2), map.get(3)], ['a', undefined, 'c']);

const bucket = new TokenBucket(333, 8);
let spent = 0;
for (let n = 0; n < 1_000; n++) {
  bucket.earn();
  spent += Number(bucket.spend());
}
assert.equal(spent, 333);
