//! Answers to admin requests that are refused.

use serde_json::{Value, json};
pub(crate) use tally_admin::Code;
use tally_admin::{Answer, Refusal};

/// The answer to a request that is refused.
pub(crate) fn error(code: Code, message: impl std::fmt::Display) -> Value {
    json!(Answer::<()>::Error(Refusal { code, message: message.to_string() }))
}
