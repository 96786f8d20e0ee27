// What a policy in JavaScript is written with: `telling` for the policy, `u64` for large
// numbers, `Config` for its configuration, lines of `key = value` with whole numbers and booleans,
// and `expect` for a state that it restores.
//
//     export const scheduler = telling({ init(text) { ... }, decide(launch) { ... }, ... });
//
//     const config = new Config(text);
//     const quietUs = config.integer('quiet_us', 100, 0, 1_000_000);
//     config.finish(); // what nobody asked for is refused
//
// What is thrown of a configuration is a message, which `init` passes on to the operator.

import { log } from 'tally:policy/host@0.1.2';

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
        if (typeof error !== 'string') log('error', `${error} in ${name}\n${error?.stack ?? ''}`);
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

export class Config {
  constructor(text) {
    this.given = new Map();
    this.known = [];
    text.split('\n').forEach((line, index) => {
      const content = line.split('#')[0].trim();
      if (content === '') return;
      const parts = /^([A-Za-z0-9_-]+)\s*=\s*(\S.*)$/.exec(content);
      if (!parts) throw `line ${index + 1}: expected \`key = value\`, got \`${content}\``;
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
