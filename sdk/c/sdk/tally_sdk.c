/* Between the functions that the contract wants exported and those that a policy
 * implements; and the configuration. See tally_sdk.h. */
#include "tally_sdk.h"
#include <string.h>

bool exports_tally_policy_scheduler_init(tally_string_t *config, tally_string_t *error) {
  const char *wrong = policy_init(*config);
  tally_string_free(config);
  if (wrong == NULL) return true;
  tally_string_dup(error, wrong);
  return false;
}

void exports_tally_policy_scheduler_decide(exports_tally_policy_scheduler_launch_t *launch,
                                           exports_tally_policy_scheduler_answer_t *answer) {
  *answer = policy_decide(launch);
}

void tally_log(tally_policy_log_level_t level, const char *line) {
  tally_string_t text = {(uint8_t *)line, strlen(line)};
  tally_policy_log_write(level, &text);
}

/* ---- configuration ---- */

static char message[256];

/* Put a message together of up to four pieces; what does not fit is left out. */
static const char *say(const char *one, tally_string_t two, const char *three, tally_string_t four) {
  size_t at = 0;
  tally_string_t parts[] = {{(uint8_t *)one, strlen(one)}, two, {(uint8_t *)three, strlen(three)}, four};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    for (size_t j = 0; j < parts[i].len && at < sizeof message - 1; j++) {
      unsigned char byte = parts[i].ptr[j];
      /* A text cut within a letter would be no text: others stand as '?'. */
      message[at++] = byte < 0x80 ? (char)byte : '?';
    }
  }
  message[at] = 0;
  return message;
}

static const tally_string_t nothing = {NULL, 0};

static bool blank(uint8_t byte) { return byte == ' ' || byte == '\t' || byte == '\r'; }

static tally_string_t trimmed(tally_string_t text) {
  while (text.len > 0 && blank(text.ptr[0])) text.ptr++, text.len--;
  while (text.len > 0 && blank(text.ptr[text.len - 1])) text.len--;
  return text;
}

/* The part before the first `byte`, and by `rest` what is after it; false if there is none. */
static bool split(tally_string_t text, uint8_t byte, tally_string_t *before, tally_string_t *rest) {
  size_t at = 0;
  while (at < text.len && text.ptr[at] != byte) at++;
  *before = (tally_string_t){text.ptr, at};
  if (at == text.len) {
    *rest = nothing;
    return false;
  }
  *rest = (tally_string_t){text.ptr + at + 1, text.len - at - 1};
  return true;
}

static bool same(tally_string_t one, tally_string_t other) {
  return one.len == other.len && memcmp(one.ptr, other.ptr, one.len) == 0;
}

void tally_config_read(tally_config *config, tally_string_t text) {
  tally_string_t line, comment, key, value;
  memset(config, 0, sizeof *config);
  while (text.len > 0 && config->wrong == NULL) {
    split(text, '\n', &line, &text);
    split(line, '#', &line, &comment);
    line = trimmed(line);
    if (line.len == 0) continue;
    bool pair = split(line, '=', &key, &value);
    key = trimmed(key);
    value = trimmed(value);
    if (!pair || key.len == 0 || value.len == 0) {
      /* Without the line: the file may be one of secrets, named by mistake. */
      config->wrong = say("a line is not `key = value`", nothing, "", nothing);
    } else if (config->count == TALLY_CONFIG_KEYS_MAX) {
      config->wrong = say("too many keys, from `", key, "` on", nothing);
    } else {
      for (size_t i = 0; i < config->count; i++) {
        if (same(config->keys[i], key)) config->wrong = say("`", key, "` is given twice", nothing);
      }
      config->keys[config->count] = key;
      config->values[config->count++] = value;
    }
  }
}

/* The value of a key, or none. */
static tally_string_t *find(tally_config *config, const char *key) {
  tally_string_t wanted = {(uint8_t *)key, strlen(key)};
  for (size_t i = 0; i < config->count; i++) {
    if (same(config->keys[i], wanted)) {
      config->asked[i] = true;
      return &config->values[i];
    }
  }
  return NULL;
}

static void wrong_value(tally_config *config, const char *key, tally_string_t value,
                        const char *expected) {
  if (config->wrong != NULL) return;
  tally_string_t expected_text = {(uint8_t *)expected, strlen(expected)};
  tally_string_t key_text = {(uint8_t *)key, strlen(key)};
  say("", key_text, " is ", value);
  size_t at = strlen(message);
  const char *joint = ": expected ";
  for (size_t i = 0; joint[i] != 0 && at < sizeof message - 1; i++) message[at++] = joint[i];
  for (size_t i = 0; i < expected_text.len && at < sizeof message - 1; i++) {
    message[at++] = (char)expected_text.ptr[i];
  }
  message[at] = 0;
  config->wrong = message;
}

void tally_config_integer(tally_config *config, const char *key, uint64_t *value, uint64_t least,
                          uint64_t most) {
  tally_string_t *text = find(config, key);
  if (text == NULL) return;
  uint64_t number = 0;
  bool good = text->ptr[0] != '_';
  for (size_t i = 0; i < text->len && good; i++) {
    uint8_t byte = text->ptr[i];
    if (byte == '_') continue;
    good = byte >= '0' && byte <= '9' && number <= (UINT64_MAX - (byte - '0')) / 10;
    if (good) number = number * 10 + (byte - '0');
  }
  if (good && number >= least && number <= most) {
    *value = number;
  } else {
    wrong_value(config, key, *text, "a whole number in its range");
  }
}

void tally_config_boolean(tally_config *config, const char *key, bool *value) {
  tally_string_t *text = find(config, key);
  if (text == NULL) return;
  if (same(*text, (tally_string_t){(uint8_t *)"true", 4})) {
    *value = true;
  } else if (same(*text, (tally_string_t){(uint8_t *)"false", 5})) {
    *value = false;
  } else {
    wrong_value(config, key, *text, "true or false");
  }
}

const char *tally_config_finish(tally_config *config) {
  for (size_t i = 0; i < config->count && config->wrong == NULL; i++) {
    if (!config->asked[i]) config->wrong = say("unknown key `", config->keys[i], "`", nothing);
  }
  return config->wrong;
}
