// Reads a policy's configuration: lines of `key = value`, whole numbers and booleans.
//
//     const config = new Config(text);
//     const quietUs = config.integer('quiet_us', 100, 0, 1_000_000);
//     config.finish(); // what nobody asked for is refused
//
// What is thrown is a message, which `init` passes on to the operator.

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
