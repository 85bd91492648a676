// SPDX-License-Identifier: Apache-2.0
// Exceptions of the headers as those of tensorpool.errors. nanobind itself makes a ValueError of std::invalid_argument.
#include <system_error>

#include "aeron_client.hpp"
#include "bindings/python.hpp"
#include "local_protocol_error.hpp"

namespace tensorpool::bindings {

namespace {

void raise(const char* name, const nb::tuple& arguments) {
    const nb::object type = nb::module_::import_("tensorpool.errors").attr(name);
    PyErr_SetObject(type.ptr(), arguments.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const aeron::AeronError& error) {
        raise("TransportError", nb::make_tuple(error.what(), error.code));
    } catch (const aeron::LoadError& error) {
        raise("TransportError", nb::make_tuple(error.what(), 0));
    } catch (const aeron::ClosedError& error) {
        raise("Closed", nb::make_tuple(error.what()));
    } catch (const LocalProtocolError& error) {
        raise("LocalProtocolError", nb::make_tuple(error.what()));
    } catch (const std::system_error& error) {
        const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

}  // namespace

void bind_errors() { nb::register_exception_translator(translate); }

}  // namespace tensorpool::bindings
