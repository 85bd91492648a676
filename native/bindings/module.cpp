// SPDX-License-Identifier: Apache-2.0
// tensorpool._core: Python bindings of the headers in native/. The files here convert arguments, decide when the GIL is
// held, and keep objects alive; everything else is in the headers, which know nothing of Python.
#include "bindings/python.hpp"
#include "seqlock.hpp"

NB_MODULE(_core, m) {
    using namespace tensorpool;
    using namespace tensorpool::bindings;
    m.doc() = "The native core of tensorpool: rings in shared memory and Aeron's C API.";
    nb::set_leak_warnings(false);  // objects that live until the interpreter exits are not a mistake of the user
    m.attr("SUPERBLOCK_BYTES") = kSuperblockBytes;
    m.attr("HEADER_SLOT_BYTES") = kHeaderSlotBytes;
    m.attr("MAX_DIMS") = kMaxDims;
    m.attr("MAX_SEQ") = kMaxSeq;
    bind_errors();
    bind_drop_reason(m);
    bind_mapping(m);
    bind_ring(m);
    bind_media_driver(m);
    bind_publication(m);
    bind_subscription(m);
    bind_aeron_client(m);
    bind_frame(m);
    bind_descriptor_feed(m);
    bind_consumer(m);
    bind_producer(m);
    bind_frame_sender(m);
    bind_assembler(m);
    bind_copies(m);
}
