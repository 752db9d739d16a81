//! Methods of inputs that may gain fields: other crates cannot write such values as literals, so
//! they take one and change it.

/// Methods that set one field each.
///
/// ```
/// # use sidelane_core::gate::RngKey;
/// assert_eq!(RngKey::new(7, 3, 1).with_seed(8), RngKey::new(8, 3, 1));
/// ```
#[macro_export]
macro_rules! with_methods {
    ($($(#[$attribute:meta])* $name:ident($field:ident: $type:ty)),+ $(,)?) => {$(
        $(#[$attribute])*
        #[doc = concat!("The same with another [`", stringify!($field), "`](Self::", stringify!($field), ").")]
        #[must_use]
        pub fn $name(mut self, $field: $type) -> Self {
            self.$field = $field;
            self
        }
    )+};
}
