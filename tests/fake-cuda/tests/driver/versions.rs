//! Features of a driver's version, by `cuGetProcAddress`.

use sys::CUdriverProcAddressQueryResult as Answer;

use crate::common::*;
use crate::ok;

fn driver(version: i32) -> Settings<'static> {
    vec![("SIDELANE_FAKE_CUDA_DRIVER", version.to_string())]
}

const NAME: &std::ffi::CStr = c"cuMemcpyBatchAsync";

#[test]
fn an_old_driver_has_no_batch_copies() {
    apart("versions::an_old_driver_has_no_batch_copies", &[driver(12050)], || {
        assert_eq!(made(|out| ok!(cuDriverGetVersion(out))), 12050);
        let (function, answer) = look_up(NAME, 12080);
        assert!(function.is_null());
        assert_eq!(answer, Answer::CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
        let (function, answer) = look_up(c"cuNoSuchThing", 12080);
        assert!(function.is_null());
        assert_eq!(answer, Answer::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
        let (function, answer) = look_up(c"cuMemCreate", 12050);
        assert!(!function.is_null());
        assert_eq!(answer, Answer::CU_GET_PROC_ADDRESS_SUCCESS);
    });
}

#[test]
fn a_newer_driver_has_the_form_that_was_asked_for() {
    apart("versions::a_newer_driver_has_the_form_that_was_asked_for", &[driver(13000)], || {
        let (first, second) = (look_up(NAME, 12080).0, look_up(NAME, 13000).0);
        assert!(!first.is_null() && !second.is_null() && first != second);
    });
}
