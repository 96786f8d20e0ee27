// What a policy in JavaScript is written with: `telling` for what it exports, answers (`run`, `hold`, ...), the
// contract's constants, `u32` and `u64` for large numbers, `Config` for its configuration, lines of `key = value` with
// whole numbers and booleans, `Writer` and `Reader` for a state that it saves, and three helpers: `Counter`,
// `TokenBucket`, `LruMap`.
//
//     export const scheduler = telling({ init(text) { ... }, decide(launch) { ... } });
//
//     const config = new Config(text);
//     const idleGapUs = config.integer('idle_gap_us', 100, 0, 1_000_000);
//     config.finish(); // what nobody asked for is refused
//
// What is thrown of a configuration is a message, which `init` passes on to the operator.

import { write } from 'tally:policy/log@0.1.0';
import { counter, counterAdd } from 'tally:policy/metrics@0.1.0';

// A time or a number that is not known.
export const UNKNOWN = 0;
// `measuredNs` of a launch whose GPU time could not be told from that of others.
export const NOT_MEASURED = 0;
// The kernel id of all kernels beyond those that the core tells apart, as `u32` gives it.
export const NO_KERNEL = 0xffff_ffff;
// A time that has not come, as `u64` gives it.
export const NEVER = 2 ** 64;
// Hold for as long as the core allows: until something changes. (Exact in a number, and longer than any hold.)
export const HOLD_UNTIL_CHANGE = 2 ** 53 - 1;
// A window that holds nothing back. (As `HOLD_UNTIL_CHANGE`.)
export const WINDOW_OPEN = 2 ** 53 - 1;
// A decision without a reason.
export const NO_REASON = 0;
// The slack while no client with an objective has a unit open.
export const NO_UNIT_OPEN = 2 ** 63;
// Units of work, or tokens, behind a service's `recent`, `p50Ns` and `p99Ns`.
export const RECENT_UNITS = 256;
// Launches behind a `p50Ns` and a `p99Ns`.
export const RECENT_SAMPLES = 32;

// Answers: what `decide` returns. A reason is a number that `define` of `tally:policy/reasons` gives a text.
export const run = (lease = 0, reason = 0) => ({ decision: { tag: 'run', val: lease }, reason });
export const hold = (ns, reason = 0) => ({ decision: { tag: 'hold', val: ns }, reason });
export const holdUntilCompletion = (ns, reason = 0) => ({
  decision: { tag: 'hold-until-completion', val: ns },
  reason,
});
export const sliced = (blocks, reason = 0) => ({ decision: { tag: 'sliced', val: blocks }, reason });
export const preemptible = (reason = 0) => ({ decision: { tag: 'preemptible' }, reason });
export const smLimited = (sms, reason = 0) => ({ decision: { tag: 'sm-limited', val: sms }, reason });

// A 32-bit number of the contract. From 2^31 on they arrive as negative ones.
export function u32(number) {
  return number >>> 0;
}

// A 64-bit number of the contract. They arrive as JavaScript's numbers, exact to 2^53, and from
// 2^63 on as negative ones: "never" (the largest there is) arrives as -1.
export function u64(number) {
  return number < 0 ? number + 2 ** 64 : number;
}

// Have the core's log say which error ended a call: to the core it is a trap.
export function telling(policy) {
  const told = {};
  for (const name of Object.keys(policy)) {
    told[name] = (...given) => {
      try {
        return policy[name](...given);
      } catch (error) {
        if (typeof error !== 'string') write('error', `${error} in ${name}\n${error?.stack ?? ''}`);
        throw error;
      }
    };
  }
  return told;
}

// Refuse a state that is not of this format, or of a later version than this.
export function expect(saved, format, versionMax) {
  if (saved.format !== format) throw `saved by '${saved.format}', expected '${format}'`;
  if (saved.version > versionMax) throw `of version ${saved.version}, expected at most ${versionMax}`;
}

// Writes a state: whole numbers from 0 to 2^53 in LEB128, and texts, as the SDKs of all languages do.
//
//     const out = new Writer('mine', 1);
//     out.number(launches);
//     return out.finish();
export class Writer {
  constructor(format, version) {
    this.format = format;
    this.version = version;
    this.bytes = [];
  }

  number(n) {
    while (n >= 0x80) {
      this.bytes.push((n % 0x80) + 0x80);
      n = Math.floor(n / 0x80);
    }
    this.bytes.push(n);
  }

  // Its length in bytes, then UTF-8.
  text(text) {
    const escaped = encodeURIComponent(text).match(/%..|./g) ?? [];
    this.number(escaped.length);
    for (const c of escaped) this.bytes.push(c.length === 3 ? parseInt(c.slice(1), 16) : c.charCodeAt(0));
  }

  finish() {
    return { format: this.format, version: this.version, data: Uint8Array.from(this.bytes) };
  }
}

// Reads it back. What is wrong is thrown, as a message that `restore` passes on to the operator.
export class Reader {
  constructor(saved, format, version) {
    expect(saved, format, version);
    if (saved.version < version) throw `of version ${saved.version}, which is no longer understood`;
    this.bytes = Uint8Array.from(saved.data);
    this.at = 0;
  }

  isDone() {
    return this.at === this.bytes.length;
  }

  // Exact to 2^53.
  number() {
    let n = 0;
    for (let place = 0; place < 10; place++) {
      if (this.isDone()) throw `byte ${this.at}: the end, within a number`;
      const byte = this.bytes[this.at++];
      const bits = byte % 0x80;
      if (place === 9 && bits > 1) break;
      n += bits * 2 ** (7 * place);
      if (byte < 0x80) return n;
    }
    throw `byte ${this.at}: a number of more than 64 bits`;
  }

  text() {
    const end = this.number() + this.at;
    if (end > this.bytes.length) throw `byte ${this.at}: the end, within a text`;
    let escaped = '';
    for (; this.at < end; this.at++) escaped += '%' + this.bytes[this.at].toString(16).padStart(2, '0');
    try {
      return decodeURIComponent(escaped);
    } catch {
      throw `byte ${this.at}: not a text`;
    }
  }
}

export class Config {
  constructor(text) {
    this.given = new Map();
    this.known = [];
    text.split('\n').forEach((line, index) => {
      const content = line.split('#')[0].trim();
      if (content === '') return;
      const parts = /^([A-Za-z0-9_-]+)\s*=\s*(\S.*)$/.exec(content);
      if (!parts) throw `line ${index + 1}: expected \`key = value\``;
      if (this.given.has(parts[1])) throw `line ${index + 1}: \`${parts[1]}\` is given already`;
      this.given.set(parts[1], parts[2]);
    });
  }

  take(key) {
    this.known.push(key);
    const value = this.given.get(key);
    this.given.delete(key);
    return value;
  }

  // A whole number from `least` to `most`.
  integer(key, usual, least, most) {
    const value = this.take(key);
    if (value === undefined) return usual;
    const number = /^[0-9][0-9_]*$/.test(value) ? Number(value.replaceAll('_', '')) : NaN;
    if (!(number >= least && number <= most)) {
      throw `${key} is ${value}: expected a whole number from ${least} to ${most}`;
    }
    return number;
  }

  // `true` or `false`.
  boolean(key, usual) {
    const value = this.take(key);
    if (value === undefined) return usual;
    if (value !== 'true' && value !== 'false') throw `${key} is ${value}: expected true or false`;
    return value === 'true';
  }

  // Refuse what was given and not asked for.
  finish() {
    for (const key of this.given.keys()) {
      throw `unknown key ${key}; known keys: ${this.known.join(', ')}`;
    }
  }
}

// A counter that calls the core once in 256.
export class Counter {
  constructor(name) {
    this.id = counter(name);
    this.held = 0;
  }

  add(delta = 1) {
    this.held += delta;
    if (this.held >= 256) this.handOver();
  }

  handOver() {
    if (this.held > 0) counterAdd(this.id, this.held);
    this.held = 0;
  }
}

// A bounded share, without randomness: every event earns `permille` thousandths of a unit.
export class TokenBucket {
  constructor(permille, burst) {
    this.permille = permille;
    this.burst = burst * 1_000;
    this.credit = 0;
  }

  earn() {
    this.credit = Math.min(this.credit + this.permille, this.burst);
  }

  // Spend a unit, if there is one.
  spend() {
    if (this.credit < 1_000) return false;
    this.credit -= 1_000;
    return true;
  }
}

// A map of bounded size that forgets what was not used for longest.
export class LruMap {
  constructor(capacity) {
    this.capacity = capacity;
    this.map = new Map();
  }

  get(key) {
    if (!this.map.has(key)) return undefined;
    const value = this.map.get(key);
    this.map.delete(key);
    this.map.set(key, value);
    return value;
  }

  set(key, value) {
    this.map.delete(key);
    this.map.set(key, value);
    if (this.map.size > this.capacity) this.map.delete(this.map.keys().next().value);
  }
}
