//! Words of a fixed set, and how fields are read.

use serde::{Deserialize, Deserializer};
use std::borrow::Cow;

/// A word that is only shown; its field's documentation says which there are.
pub type Word = Cow<'static, str>;

/// An optional field that must be there, if only as `null`: serde takes a missing one for `None` otherwise.
pub(crate) fn required<'de, D, T>(from: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(from)
}

/// An enum whose values are words. The first is the default; a word that is not known is read as `Unknown`.
macro_rules! words {
    (
        $(#[$about:meta])*
        pub enum $name:ident {
            $(#[$about_first:meta])* $first:ident = $first_word:literal,
            $($(#[$about_next:meta])* $next:ident = $word:literal,)*
        }
    ) => {
        $(#[$about])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
        )]
        pub enum $name {
            $(#[$about_first])*
            #[default]
            #[serde(rename = $first_word)]
            $first,
            $($(#[$about_next])* #[serde(rename = $word)] $next,)*
            /// A word that this release does not know.
            #[serde(other, rename = "unknown")]
            Unknown,
        }

        impl $name {
            /// The word in JSON.
            pub fn as_str(self) -> &'static str {
                match self {
                    $name::$first => $first_word,
                    $($name::$next => $word,)*
                    $name::Unknown => "unknown",
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }
    };
}
pub(crate) use words;
